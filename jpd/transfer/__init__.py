"""Moving KV pages between meshes: one protocol, the plan behind it and its implementations."""
