"""Own definitions of well known architectures, sized by their arguments."""
