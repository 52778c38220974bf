"""flashsoftmax behind the interfaces of other libraries. Each module imports what it needs, when it is imported."""
