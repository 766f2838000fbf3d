"""The `tensorrt` engine: dense segments of an ONNX graph in a runtime, everything between them in our kernels."""
