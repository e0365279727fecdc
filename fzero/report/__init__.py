"""What a plan or a state is made of, for people.

- `report`: a row for each leaf, of a plan or of a state, and their sums; `description`
  (`fz.describe`) and `placement` (`fz.placement`) print it; `communication`: what a step sends.
- `layout`: the shardings themselves.
- `pages`: HTML from templates, here those that all pages share.
"""
