"""Programs that show the library at work; each is run by a test."""
