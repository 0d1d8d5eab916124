"""Device meshes, sharding rules and platform set-up."""
