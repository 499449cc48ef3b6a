"""Several engines behind one server, on Ray Serve.

                   supervisor
                  /          \\
  client ── HTTP process ── gateway ──┬── replica: relay ── engine process
                            router    └── replica: relay ── engine process

The gateway takes the engine's place: it listens on the engine's Unix socket and speaks its protocol, so
neither the supervisor nor the HTTP process knows of replicas. Ray Serve places, checks, restarts, scales and
drains the replicas, and calls our router. Audio does not pass through Ray: the gateway has a connection to
each replica.

    routing     which replica speaks soonest; pure arithmetic
    link        the gateway's connection to a replica
    relay       the replica's end of it: a TCP port in front of the engine's socket
    dispatch    sends requests to replicas, and unheard ones to another
    gateway     the engine's side of the protocol (serving/gateway.py); gateway_process starts it
    engine_host the engine process in a replica
    replica     what Ray Serve runs; deployment, router and scaling are its settings

Only deployment, replica and router import Ray, which is the extra `ray`.
"""
