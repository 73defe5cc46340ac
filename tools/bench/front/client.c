// A load generator for HTTP/1.1 and server-sent events: one thread, epoll, keep-alive. Prints one JSON object.
//
//   client PORT PATH BODY_FILE [-c connections] [-n requests] [-t seconds] [-l events] [-i] [-r connects/s]
//
// Each connection sends the same POST again and again. -n: requests of all connections together; -t: no new
// requests after that many seconds, and open ones are closed. -l: leave, that is close the connection, after so
// many events (0: 20 ms after the request was sent). -i: when each connection has had its first event,
// print {"open": N} and keep the streams open until standard input ends. Times are CLOCK_MONOTONIC.

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 4096, READ_BYTES = 1 << 16, MAX_SAMPLES = 1 << 20, LINE_BYTES = 64 };
enum phase { UNCONNECTED, CONNECTING, SENDING, HEADERS, BODY };

struct connection {
  int fd;
  enum phase phase;
  size_t sent;                 // bytes of the request
  char headers[HEADER_BYTES];  // of the response, until they are complete
  size_t header_bytes;
  int status, chunked, in_chunk_size, closes;
  long left;             // bytes of the chunk or of the body; of a chunk with its CRLF
  char line[LINE_BYTES]; // start of the current line of the body
  size_t line_bytes;     // of the whole line
  long events;           // of this response
  int ended;             // whether [DONE] or the last byte has come
  double began;
};

struct samples {
  float *values;
  long count;
};

static struct {
  struct sockaddr_in address;
  int connections, idle, leaves;
  long leave_after, requests;
  double seconds, connects_per_s;
} settings = {.connections = 1, .leave_after = -1, .connects_per_s = 5000};

static struct {
  long begun, ended, failed, left, events, bytes, opened, statuses[600];
  struct samples first_event, whole;
  char error[128];
} totals;

static char *request;
static size_t request_bytes;
static int poller;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static void pause_ms(long ms) {
  struct timespec time = {0, ms * 1000000};
  nanosleep(&time, NULL);
}

static void die(const char *what) {
  fprintf(stderr, "client: %s: %s\n", what, errno ? strerror(errno) : "wrong");
  exit(2);
}

static void add(struct samples *to, double value) {
  if (!to->values && !(to->values = malloc(MAX_SAMPLES * sizeof(float)))) die("malloc");
  if (to->count < MAX_SAMPLES) to->values[to->count++] = (float)value;
}

static void fail(const char *why) {
  totals.failed++;
  if (!totals.error[0]) snprintf(totals.error, sizeof totals.error, "%s", why);
}

// ---------------------------------------------------------------- connections

static void watch(struct connection *one, int operation, unsigned events) {
  struct epoll_event wanted = {.events = events, .data.ptr = one};
  if (epoll_ctl(poller, operation, one->fd, &wanted)) die("epoll_ctl");
}

static void disconnect(struct connection *one) {
  if (one->phase != UNCONNECTED) close(one->fd);
  one->phase = UNCONNECTED;
}

static void connect_one(struct connection *one) {
  int yes = 1;
  one->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (one->fd < 0) die("socket");
  setsockopt(one->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  one->phase = CONNECTING;
  if (connect(one->fd, (struct sockaddr *)&settings.address, sizeof settings.address) && errno != EINPROGRESS)
    die("connect");
  watch(one, EPOLL_CTL_ADD, EPOLLOUT);
}

static void send_request(struct connection *one) {
  while (one->sent < request_bytes) {
    ssize_t count = write(one->fd, request + one->sent, request_bytes - one->sent);
    if (count < 0) {
      if (errno == EAGAIN) return;
      fail("the request could not be written");
      disconnect(one);
      return;
    }
    one->sent += count;
  }
  one->phase = HEADERS;
  watch(one, EPOLL_CTL_MOD, EPOLLIN);
}

// Begins the next request; returns whether there is one left.
static int begin(struct connection *one) {
  if (settings.requests && totals.begun >= settings.requests) return 0;
  totals.begun++;
  one->sent = one->header_bytes = one->line_bytes = 0;
  one->events = one->ended = one->closes = 0;
  one->began = now();
  if (one->phase == UNCONNECTED) {
    connect_one(one);
  } else {
    one->phase = SENDING;
    send_request(one);
  }
  return 1;
}

static void leave(struct connection *one) {
  printf("{\"left_at\": %.6f}\n", now());
  disconnect(one);
  totals.left++;
  pause_ms(150);  // so that the server's reaction belongs to this client
}

static void end(struct connection *one) {
  totals.ended++;
  totals.statuses[one->status < 600 ? one->status : 0]++;
  add(&totals.whole, now() - one->began);
  if (one->closes) disconnect(one);
}

// ---------------------------------------------------------------- the response

// Takes one byte run of the body: counts lines that begin with "data: ".
static void take_body(struct connection *one, const char *data, size_t count) {
  totals.bytes += count;
  while (count) {
    const char *stop = memchr(data, '\n', count);
    size_t part = stop ? (size_t)(stop - data) : count;
    if (one->line_bytes < LINE_BYTES) {
      size_t room = LINE_BYTES - one->line_bytes;
      memcpy(one->line + one->line_bytes, data, part < room ? part : room);
    }
    one->line_bytes += part;
    data += part, count -= part;
    if (!stop) return;
    data++, count--;
    if (one->line_bytes == 12 && !memcmp(one->line, "data: [DONE]", 12)) {
      one->ended = 1;
    } else if (one->line_bytes >= 6 && !memcmp(one->line, "data: ", 6)) {
      totals.events++;
      if (one->events++ == 0) {
        totals.opened++;
        add(&totals.first_event, now() - one->began);
      }
    }
    one->line_bytes = 0;
  }
}

static const char *header(const struct connection *one, const char *name) {
  size_t length = strlen(name);
  for (const char *line = one->headers; (line = strstr(line, "\r\n")); ) {
    line += 2;
    if (!strncasecmp(line, name, length) && line[length] == ':') return line + length + 1;
  }
  return NULL;
}

// Parses the complete headers. Returns whether they are usable.
static int read_headers(struct connection *one) {
  one->status = one->header_bytes > 12 ? atoi(one->headers + 9) : 0;
  const char *length = header(one, "content-length"), *closes = header(one, "connection");
  one->chunked = header(one, "transfer-encoding") != NULL;
  one->closes = closes && strstr(closes, "close") != NULL;
  if (!one->status || (!one->chunked && !length)) return 0;
  one->left = one->chunked ? 0 : atol(length);
  one->in_chunk_size = one->chunked;
  one->phase = BODY;
  return 1;
}

// Takes bytes of the body with its chunked coding. Returns whether the response has ended, -1 if it is invalid.
static int take_coded(struct connection *one, const char *data, size_t count) {
  if (!one->chunked) {
    take_body(one, data, count);
    return (one->left -= count) <= 0;
  }
  while (count) {
    if (one->in_chunk_size) {
      char byte = *data++;
      count--;
      if (byte == '\n') {
        if (one->in_chunk_size == 2) return 1;  // the empty line behind the last chunk
        one->left += 2;
        one->in_chunk_size = one->left == 2 ? 2 : 0;
      } else if (byte != '\r' && one->in_chunk_size == 1) {
        int digit = byte >= '0' && byte <= '9' ? byte - '0' : (byte | 32) - 'a' + 10;
        if (digit < 0 || digit > 15) return -1;
        one->left = one->left * 16 + digit;
      }
      continue;
    }
    size_t body = one->left > 2 ? (size_t)one->left - 2 : 0, part = body < count ? body : count;
    take_body(one, data, part);
    data += part, count -= part, one->left -= part;
    while (count && one->left <= 2 && one->left > 0) data++, count--, one->left--;
    if (!one->left) one->in_chunk_size = 1;
  }
  return 0;
}

static void receive(struct connection *one) {
  static char buffer[READ_BYTES];
  ssize_t count = read(one->fd, buffer, sizeof buffer);
  if (count < 0 && errno == EAGAIN) return;
  if (count <= 0) {
    fail(count ? strerror(errno) : "the server closed the connection");
    disconnect(one);
    return;
  }
  const char *data = buffer;
  if (one->phase == HEADERS) {
    size_t room = HEADER_BYTES - 1 - one->header_bytes, part = (size_t)count < room ? (size_t)count : room;
    memcpy(one->headers + one->header_bytes, data, part);
    one->headers[one->header_bytes + part] = 0;
    char *stop = strstr(one->headers, "\r\n\r\n");
    if (!stop && part == room) fail("the headers are too large"), disconnect(one);
    if (!stop) {
      one->header_bytes += part;
      return;
    }
    size_t used = (stop + 4 - one->headers) - one->header_bytes;
    one->header_bytes = stop + 4 - one->headers;
    stop[4] = 0;
    if (!read_headers(one)) {
      fail("the response has no length"), disconnect(one);
      return;
    }
    data += used, count -= used;
  }
  int ended = take_coded(one, data, count);
  if (ended < 0) fail("the chunks are invalid"), disconnect(one);
  else if (ended && one->events && !one->ended) fail("a stream ended without [DONE]"), disconnect(one);
  else if (ended) end(one);
  else if (settings.leaves && one->events >= settings.leave_after) leave(one);
}

// ---------------------------------------------------------------- the run

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *from) {
  qsort(from->values, from->count, sizeof(float), by_value);
  long n = from->count;
  if (!n) return;
  printf(", \"%s\": {\"p50\": %.3f, \"p99\": %.3f, \"max\": %.3f}", name, 1e3 * from->values[n / 2],
         1e3 * from->values[n * 99 / 100], 1e3 * from->values[n - 1]);
}

static void print_totals(double seconds) {
  printf("{\"seconds\": %.4f, \"requests\": %ld, \"failed\": %ld, \"left\": %ld, \"events\": %ld, \"bytes\": %ld",
         seconds, totals.ended, totals.failed, totals.left, totals.events, totals.bytes);
  printf(", \"requests_per_s\": %.1f, \"events_per_s\": %.1f, \"statuses\": {", totals.ended / seconds,
         totals.events / seconds);
  for (int status = 0, any = 0; status < 600; status++)
    if (totals.statuses[status])
      printf("%s\"%d\": %ld", any++ ? ", " : "", status, totals.statuses[status]);
  printf("}");
  print_samples("first_event_ms", &totals.first_event);
  print_samples("request_ms", &totals.whole);
  if (totals.error[0]) printf(", \"error\": \"%s\"", totals.error);
  printf("}\n");
}

static void step(struct connection *one, unsigned events) {
  if (one->phase == CONNECTING) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(one->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
      fail(strerror(error));
      disconnect(one);
      return;
    }
    one->phase = SENDING;
  }
  if (one->phase == SENDING) {
    send_request(one);
    if (one->phase == HEADERS && settings.leaves && settings.leave_after == 0) {
      pause_ms(20);  // until the server has read the request
      leave(one);
    }
  } else if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    receive(one);
  }
}

static void run(struct connection *all) {
  struct epoll_event found[512];
  double start = now(), stop = settings.seconds ? start + settings.seconds : 1e300;
  int open = 0, started = 0, more = 1, said = 0;
  while (open > 0 || (more && started < settings.connections)) {
    double time = now();
    while (more && started < settings.connections && started < (time - start) * settings.connects_per_s + 1) {
      if ((more = begin(&all[started]))) open++, started++;
    }
    if (time >= stop) break;
    int count = epoll_wait(poller, found, 512, started < settings.connections && more ? 1 : 100);
    for (int i = 0; i < count; i++) {
      struct connection *one = found[i].data.ptr;
      long before = totals.ended + totals.failed + totals.left;
      step(one, found[i].events);
      if (totals.ended + totals.failed + totals.left > before && (settings.idle || !begin(one))) {
        disconnect(one);
        open--;
      }
    }
    if (settings.idle && !said && totals.opened + totals.ended + totals.failed >= settings.connections) {
      said = 1;
      printf("{\"open\": %d, \"after_s\": %.3f}\n", open, now() - start);
      fflush(stdout);
      fcntl(0, F_SETFL, O_NONBLOCK);
    }
    char byte;
    if (said && read(0, &byte, 1) == 0) break;
  }
  print_totals(now() - start);
}

static void read_arguments(int count, char **arguments) {
  if (count < 4) errno = 0, die("usage: client PORT PATH BODY_FILE [options]");
  settings.address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(arguments[1]))};
  settings.address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  FILE *file = fopen(arguments[3], "rb");
  if (!file) die(arguments[3]);
  static char body[1 << 20];
  size_t bytes = fread(body, 1, sizeof body, file);
  fclose(file);
  if (!(request = malloc(bytes + 1024))) die("malloc");
  int head = snprintf(request, 1024,
                      "POST %s HTTP/1.1\r\nhost: localhost:%s\r\ncontent-type: application/json\r\n"
                      "content-length: %zu\r\n\r\n",
                      arguments[2], arguments[1], bytes);
  memcpy(request + head, body, bytes);
  request_bytes = head + bytes;
  optind = 4;
  for (int option; (option = getopt(count, arguments, "c:n:t:l:ir:")) >= 0;) {
    if (option == 'c') settings.connections = atoi(optarg);
    else if (option == 'n') settings.requests = atol(optarg);
    else if (option == 't') settings.seconds = atof(optarg);
    else if (option == 'l') settings.leaves = 1, settings.leave_after = atol(optarg);
    else if (option == 'i') settings.idle = 1;
    else if (option == 'r') settings.connects_per_s = atof(optarg);
    else errno = 0, die("unknown option");
  }
}

int main(int count, char **arguments) {
  read_arguments(count, arguments);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  struct connection *all = calloc(settings.connections, sizeof *all);
  if (!all || (poller = epoll_create1(0)) < 0) die("start");
  run(all);
  return totals.failed > 0;
}
