"""acme as a vendor of dlinfer. Importing this package loads nothing; ``vendor.py`` says what there is."""
