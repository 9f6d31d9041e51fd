"""Small frozen values that pass between the other folders."""
