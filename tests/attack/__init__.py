"""An attack on everything that is written and read: kills, damage, hostile files, full disks, races.

`make attack` runs it for as long as one likes; `make test` runs a short form with fixed seeds.
"""
