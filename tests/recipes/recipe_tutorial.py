"""The tutorial for language models, with the SDK of OpenAI."""

from tests.docs.test_tutorials import NEEDS_SDK, TUTORIALS
from tests.docs.tutorial import Tutorial


def test_a_reader_can_follow_the_tutorial(tmp_path):
    (page,) = (page for page in TUTORIALS if page.name in NEEDS_SDK)
    with Tutorial(page, tmp_path) as tutorial:
        assert tutorial.follow() > 0
