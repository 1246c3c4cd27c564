"""Other projects' config keys in our tree: a table of names, rules for keys that belong together, the translation."""
