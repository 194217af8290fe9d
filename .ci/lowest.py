"""Print pins of the lowest versions that pyproject.toml allows, for `make test-lowest`, and of what its tests need."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for line in project["dependencies"]:
    print(line.replace(">=", "=="))
for line in project["optional-dependencies"]["dev"]:
    if re.match("pytest|peft|statsmodels", line):
        print(line)
