"""bfloat16 matrices that are packed in 12 bits a number, without loss."""
