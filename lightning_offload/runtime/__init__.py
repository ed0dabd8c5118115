"""Executes a memory plan through saved-tensor hooks and one dispatch mode; knows no cost model and no policy."""
