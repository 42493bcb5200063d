"""What runs in Ray Serve's replicas in front of the engines.

The path of one request with PD (pd-pack and pd-spread), with the module of each step:

1. HAProxy on the head node hands the request to a decode replica, or to an ingress replica that calls a decode
   replica through Ray. `pdlab.deploy.serving_path` chooses between the two.
2. The decode replica's HTTP server refuses what no engine may get: unknown routes, too many sequences, bodies that are
   too long, tools that no parser reads. `guard`
3. A request for several sequences becomes one request per sequence, because one set of transfer parameters belongs to
   the KV blocks of one prompt. `sequences`
4. Decode calls prefill for one token. `prefill_router` picks the replica. The call ends after a time limit, is made
   once more on another replica, or is replaced by computing the prompt on decode. `prefill_call`
5. The prefill engine computes the prompt, keeps its KV blocks under a lease, and answers with the transfer parameters.
   A prefill replica that is to stop waits until its blocks were read. `drain`
6. Decode's scheduler admits the request, and decode's workers read the KV blocks with NIXL.
   `pdlab.guard.scheduler` and `pdlab.guard.worker` compute on decode what was not received intact.
7. The decode engine generates. A replica ends itself if its engine core died (`dead_engine`), and it is unhealthy if
   its engine core has work and takes no step (`step_watch`).
8. The usage of the answer is that of the engine that computed the prompt (`usage`), and the answers of several
   sequences become one answer (`sequences`). An engine's error becomes an HTTP status with its reason
   (`engine_errors`).
9. If the client went away between steps 5 and 6, decode tells prefill to free the blocks. `prefill_call`

With pd-fluid the same engine may prefill and decode. `fluid_router` picks the replica of steps 1 and 4 by the roles
that `role_board` decides, `engine_traffic` measures what passes through an engine for that decision, and `elastic`
changes the number of engines. `builders` puts all of this around Ray Serve LLM's own applications. Modules are sent to
the replicas by value, so that nodes need no pdlab; `guard_sources` writes the KV guard's files there.
"""
