"""The client: a library, a command and a load test."""
