"""One function per operation: a plain torch reference and fast versions with the same signature."""
