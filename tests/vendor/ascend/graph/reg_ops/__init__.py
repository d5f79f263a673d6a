"""What the vendor declares of the ops of its graphs (GE): REG_OP in the sources of torchair.

``documents.read`` gives it as data, ``rules.faults`` says what a graph's message has against it. Nothing is computed.
"""
