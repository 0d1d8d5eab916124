"""The doors: OpenAI HTTP, gRPC, and the text layer they share with the Python API."""
