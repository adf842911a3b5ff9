"""Requests alone and in crowds over real services, and whether they were told the same.

requests.py     random requests, each a message that can be written down
deployments.py  how services may be set up, and one that runs
answers.py      what a request was told, position by position, and where two answers differ
driving.py      one request alone, many at random moments
reproducing.py  the smallest crowd that still differs, as a file
"""
