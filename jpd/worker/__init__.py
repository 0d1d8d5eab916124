"""Workers: one mesh, one thread, one role each, and what the router may say to them."""
