"""The HTTP server: an API process and an engine process, joined by ZeroMQ."""
