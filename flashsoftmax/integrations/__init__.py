"""flashsoftmax behind the interfaces of other libraries. Import the one you want; nothing is imported here."""
