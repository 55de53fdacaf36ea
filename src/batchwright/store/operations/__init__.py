"""What the store does, as functions of a transaction, named as the methods of `Store` that they carry out."""
