"""The pure core: requests and results in, batches and events out. No I/O, no clock, no torch, no grpc."""
