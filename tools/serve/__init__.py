"""`tridecode serve`: runs tritonserver on a model repository, reloads dead doors, restarts a dead server, and
drains on SIGTERM.

    tridecode serve ── guard ── tritonserver ── doors ─ ─ supervisor ── ranks
                          (a dashed line: a process that is started by it, in a session of its own)

The engines live as long as the guard, so a tritonserver that died is started again with a warm engine.
Whichever of these processes is killed, nothing is left behind: see guard.py, and backend/supervisor/main.py
for a tritonserver without `serve`. docs/design/security.md says what listens, and who may call what.

    command         the commands `tridecode serve` and `tridecode tritonserver`
    options         settings of `serve`, and the command line of tritonserver that follows from them
    checks          repository, names and flags, before anything starts
    serving         one run: start, restarts, end          start, server_watch, drain   its three phases
    guarded_server  starts guard.py, which starts tritonserver and cleans up after it
    server_process  `tridecode serve` as a child process: tests, the demonstration, benchmarks
"""
