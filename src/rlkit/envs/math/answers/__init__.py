"""Answers to mathematical questions: reading them, and telling whether two of them are the same.

    text ─cleaning, lexer─► tokens ─reader, labels, expressions─► value ─comparison─► yes, no or unknown

Nothing here evaluates code, and nothing takes longer than its limits on length, depth, digits and work allow.
"""
