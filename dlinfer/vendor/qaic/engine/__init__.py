"""The graph engine ``qaic``. A region becomes an .onnx file, is compiled for a card, and runs in a Session."""
