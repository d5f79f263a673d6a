"""Small modules that know neither ops nor graphs: any package may import them."""
