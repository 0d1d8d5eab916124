"""The paged KV cache: pages on device, who owns them, and which prompts they already hold."""
