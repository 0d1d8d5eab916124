"""Who does what: admission, placement, sessions, failure policy, the life of a request. No jax."""
