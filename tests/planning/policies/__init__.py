"""Published systems as policies: exact choices on hand-made networks, and the same bits on real ones."""
