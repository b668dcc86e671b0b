"""Red team: scripted cheats against tasks and environments.

report = await attack_tasks(tasks, environment=environment("local"), jobs=2)
report.exploits    # attempts with more reward than an honest empty one
"""
