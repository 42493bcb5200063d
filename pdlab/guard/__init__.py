"""The KV guard: what runs inside vLLM's engines so that KV cache that did not arrive whole is never decoded."""
