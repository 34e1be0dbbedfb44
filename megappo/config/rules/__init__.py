"""Rules between settings, models and the world size, by what they are about.

Each function yields a sentence per broken rule: the dotted key with its value, the rule, the nearest valid value.
"""
