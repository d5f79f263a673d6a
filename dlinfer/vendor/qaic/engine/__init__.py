"""The graph engine ``qaic``: a region becomes an .onnx file, is compiled for a card, and runs in a Session."""
