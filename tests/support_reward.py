"""A reward that random models can't all fail: the share of digits in the response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
