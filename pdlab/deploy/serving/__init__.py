"""What runs in Ray Serve's replicas in front of the engines.

The path of one request with PD (pd-pack and pd-spread), with the module of each step:

1. HAProxy on the head node hands the request to a decode replica, which Ray's request router chooses, or to an ingress
   replica that calls a decode replica through Ray. `pdlab.deploy.serving_path` chooses between the two paths.
2. The decode replica's HTTP server refuses what no engine may get: unknown routes, too many sequences, bodies that are
   too long, tools that no parser reads (`guard`). It notes the time (`timeline`), and decides by the request id whether
   the request gets OpenTelemetry spans (`traces`).
3. A request for several sequences becomes one request per sequence, because one set of transfer parameters belongs to
   the KV blocks of one prompt. `sequences`
4. Decode calls prefill for one token. `prefill_router` picks the replica. The call ends after a time limit, is made
   once more on another replica, or is replaced by computing the prompt on decode. `prefill_call`
5. The prefill engine computes the prompt, keeps its KV blocks under a lease (`pdlab.guard.leases`), and answers with
   its token and the transfer parameters. A prefill replica that is to stop waits until its blocks were read. `drain`
6. With --early-token, decode sends prefill's token to the client now, if decode would give the same one. `early_token`
7. Decode's scheduler admits the request, and decode's workers read the KV blocks with NIXL. Decode uses them only if
   prefill confirms that they still belonged to the request; else it computes the prompt. `pdlab.guard.scheduler`,
   `pdlab.guard.worker`, `pdlab.guard.receives`; with --kv-poll-ms also `pdlab.guard.read_ends`
8. The decode engine generates. With --reuse-first-token it begins after prefill's token (`pdlab.guard.first_token`). A
   replica ends itself if its engine core died (`dead_engine`), and it is unhealthy if its engine core has work and
   takes no step (`step_watch`).
9. The usage of the answer is that of the engine that computed the prompt (`usage`), and the answers of several
   sequences become one answer (`sequences`); `events` reads and writes the stream. An engine's error becomes an HTTP
   status with its reason (`engine_errors`).
10. The parts of the request's time go into the answer if the client wants them (`timeline`), into Ray's metrics
    (`ttft_metrics`), and into spans (`traces`).
11. If the client went away between steps 5 and 7, decode has prefill free the blocks. `prefill_call`

With pd-fluid the same engine may prefill and decode (`fluid`). `fluid_router` picks the replica of steps 1 and 4 by the
roles that `role_board` decides, `engine_traffic` measures what passes through an engine for that decision, and
`elastic` changes the number of engines.

`builders` puts all of this around Ray Serve LLM's own applications. Modules are sent to the replicas by value, so that
nodes need no pdlab; `guard_sources` writes the KV guard's files there. When an engine starts, `nixl_port` chooses its
port for NIXL, `kv_pool` exports the size of its KV pool, and `vllm_costs` removes work that vLLM repeats for each step.
`ray_names` and `vllm_names` have the private names that a new version of Ray or vLLM may change.
"""
