"""The gRPC contract: jpd.proto and the stubs generated from it (`make proto`)."""
