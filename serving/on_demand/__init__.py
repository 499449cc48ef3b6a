"""Models on demand: each model has its own engine process, from the first request to the keep-alive's end.

                   supervisor
                  /          \\
  client ── HTTP process ── gateway ──┬── engine process of the model a
                                      └── engine process of the model b

The gateway takes the engine's place: it listens on the engine's Unix socket and speaks its protocol, so the
HTTP process serves all models, loaded or not. A model is unloaded by ending its process, so that all of its
memory, sockets and files come back.

    survey       the models of a directory, as engine/survey.py finds them: their abilities and memory plans
    decide       which model is loaded or unloaded now; a pure function
    process      the engine process of a model
    models       all models: their states, and their requests
    gateway      the engine's side of the protocol; gateway_process starts it
"""
