"""A flush: rows taken, gathered and laid out as they are sent."""
