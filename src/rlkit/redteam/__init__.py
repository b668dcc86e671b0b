"""The red team: scripted cheats against tasks and environments.

report = await attack_tasks(tasks, environment=environment("local"), jobs=2)
report.earned    # the cheats that got more than an honest empty attempt
"""
