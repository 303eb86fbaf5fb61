"""Files as the server writes them: durable, past the page cache, and replaceable in tests."""
