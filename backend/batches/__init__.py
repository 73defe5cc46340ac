"""Files of requests in OpenAI's batch format: their lines, the requests, the files of answers."""

#: of lines that give none, and of all lines of a service
LOWEST_PRIORITY = 2**31 - 1
