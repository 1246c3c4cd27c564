"""Translation of other projects' config keys: the table of names, rules for combinations of keys,
and the translator. Defines no setting of turnwise's own (schema.py)."""
