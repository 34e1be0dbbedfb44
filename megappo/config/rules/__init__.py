"""Rules between settings, models and the world size, grouped by topic.

Each function yields one sentence per violated rule. The sentence contains the dotted key with its value, the rule and
the nearest valid value.
"""
