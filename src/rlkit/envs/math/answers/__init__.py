"""Reading and comparison of answers to mathematical questions.

    text ─cleaning, lexer─► tokens ─reader, labels, expressions─► value ─comparison─► yes, no or unknown

No text is evaluated as code. Limits on length, depth, digits and work bound the time.
"""
