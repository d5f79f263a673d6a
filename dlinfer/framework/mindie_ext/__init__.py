"""The MindIE adaptor: ``GeneratorTorch``, which a third-party server drives, on dlinfer's ops."""
