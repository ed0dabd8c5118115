"""Lightning examples: a script, and LightningCLI with a configuration file."""
