"""Reading and comparison of answers to mathematical questions.

    text ─cleaning, lexer─► tokens ─reader, labels, expressions─► value ─comparison─► yes, no or unknown

Nothing here evaluates code, and limits on length, depth, digits and work bound the time.
"""
