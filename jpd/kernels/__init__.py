"""Device kernels behind one interface each, every one with a reference in plain jax.numpy."""
