"""What tests share. Tests import from here (`from helpers.small import …`), never from each other."""
