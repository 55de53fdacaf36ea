"""Operations of the store, as functions of a transaction, each named after the method of `Store` that runs it."""
